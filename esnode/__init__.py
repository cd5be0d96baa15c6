"""The node: a replica of the model, an engine that runs it, the tasks that score it, and the command line."""

__version__ = "0.1.0"
