"""Python code that all nxrt execution provider wheels carry."""
