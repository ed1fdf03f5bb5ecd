"""GPU operations for coding agents: small, validated steps that make the rules of the skills stick."""

__version__ = "0.1.0"
