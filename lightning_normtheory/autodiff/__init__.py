"""Derivatives that autograd alone gets wrong or cannot give."""
