"""Fixtures for everything that talks to a machine."""

from remote.runner_machine import machine, root
from sshd import sshd, sshd_factory

__all__ = ["machine", "root", "sshd", "sshd_factory"]
