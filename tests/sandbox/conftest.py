from sandbox_fixture import login_key, make_sandbox

__all__ = ["login_key", "make_sandbox"]
