"""The routes, a module each."""
