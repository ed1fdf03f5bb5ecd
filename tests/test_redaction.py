"""What is written where people read it holds no key."""

from __future__ import annotations

import pytest

from gpu_skills.redaction import redact

URL = (
    "https://b.s3.amazonaws.com/J-1/out.bin?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAEXAMPLE%2F20260101"
    "&X-Amz-Expires=600&X-Amz-Security-Token=FwoGZXIvYXdzEXAMPLE&X-Amz-Signature=0123456789abcdef"
)
OLD = "https://b.s3.amazonaws.com/k?AWSAccessKeyId=AKIAEXAMPLEEXAMPLE&Signature=ab%2Bcd%3D&Expires=1760000000"


@pytest.mark.parametrize("url", [URL, OLD, URL.lower()])
@pytest.mark.parametrize("around", ["{}", "PUT {} -> 200", '{{"url": "{}"}}', "<Url>{}</Url>"])
def test_a_presigned_url_is_shown_without_what_makes_it_a_key(url, around):
    shown = redact(around.format(url))
    for part in ("0123456789abcdef", "FwoGZX", "fwogzx", "AKIAEXAMPLE", "akiaexample", "ab%2Bcd"):
        assert part not in shown
    assert "amazonaws.com" in shown and ("Expires=" in shown or "expires=" in shown)


@pytest.mark.parametrize(
    "text",
    [
        "git clone https://me:orchid5417@example.org/x.git",
        "Authorization: Basic orchid5417==",
        "authorization: Bearer orchid5417",
        "WANDB_API_KEY=orchid5417",
        "aws_secret_access_key = orchid5417/abc",
        'MY_TOKEN="orchid5417"',
        "github_pat_11orchid5417abc",
    ],
)
def test_logins_in_addresses_and_named_values_are_not_shown(text):
    assert "orchid5417" not in redact(text) and "***" in redact(text)


@pytest.mark.parametrize(
    "text", ["https://example.org:8443/a@b", "a tokenizer: fast", "tokens/s: 1834", "HTTP://h/x keys=3", "mytoken: x"]
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text
