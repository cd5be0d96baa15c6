"""The sequencer of a run: hands out work, collects rewards, signs commits. Never holds a model, never imports torch."""
