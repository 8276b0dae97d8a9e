"""The version, for those who would else have to import the whole package to name it."""

__version__ = "0.1.0"
