"""From token ids to text: decoding, stop strings, held-back tails."""
