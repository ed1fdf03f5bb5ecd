"""Moving trees to a machine and outputs back: the two calls that the procedures above use."""

from gpu_skills.remote.download import DownloadReport, download
from gpu_skills.remote.upload import UploadReport, upload

__all__ = ["DownloadReport", "UploadReport", "download", "upload"]
