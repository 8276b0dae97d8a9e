"""The version, in a module of its own, so that it can be read without importing the whole package."""

__version__ = "0.3.0"
