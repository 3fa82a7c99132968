"""Who is alive, who gets what: node registry and routing."""
