"""The cache daemon of a node: protocol, server, client."""
