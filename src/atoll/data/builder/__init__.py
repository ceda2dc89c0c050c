"""`atoll data build`: folders and installed packages to shards of long, clean documents. Read `pipeline.build`; it names the rest."""
