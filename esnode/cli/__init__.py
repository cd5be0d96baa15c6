"""The command line: one module per family of commands; each parses its words and calls one function."""
