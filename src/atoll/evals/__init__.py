"""Measuring a model: bits per byte of text it has not seen, beside what general compressors make of the same files."""
