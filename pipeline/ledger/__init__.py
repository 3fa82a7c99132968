"""The ledger: which requests exist, who owns them, what they produced. Redis holds it."""
