"""From a request body to token ids, and from token ids back to an answer. No HTTP here."""
