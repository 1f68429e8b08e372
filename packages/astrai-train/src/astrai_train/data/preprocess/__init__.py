"""From files of text, conversations and preferences to pre-tokenised stores."""
