"""Engines: one interface over a model that runs. Weights never leave an engine except through `read`."""
