"""Operators that a decoder is made of, in forms for each kind of machine."""
