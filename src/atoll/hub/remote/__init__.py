"""The files that an exported folder carries for transformers; Atoll itself does not import them."""
