from s3_server import s3, s3_application

__all__ = ["s3", "s3_application"]
