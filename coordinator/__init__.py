"""The sequencer of a run: hands out work, collects rewards, signs commits. No model, no torch."""
