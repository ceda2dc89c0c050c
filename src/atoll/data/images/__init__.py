"""Pictures among text: read, scaled, cut into patches, packed with text into rows by global sample index (docs/vision.md)."""
