"""Types of the pyo3 module."""

VERSION: str
