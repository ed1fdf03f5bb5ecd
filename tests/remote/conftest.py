"""Fixtures for everything that talks to a machine."""

from sshd import sshd, sshd_factory

__all__ = ["sshd", "sshd_factory"]
