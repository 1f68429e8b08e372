"""Compiled modules (row B2). ``_C`` is put here by the wheel build; a source tree has none."""
