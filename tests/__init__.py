"""Tests. A package only so that `python -m tests.world` finds the simulator."""
