"""No file that git keeps holds a key, a token or a private key of a known form."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from detect_secrets.core.scan import scan_file
from detect_secrets.settings import transient_settings

REPOSITORY = Path(__file__).resolve().parents[1]
# Those that know a form. Guesses by entropy or by a word like "password" find hashes and test data.
DETECTORS = (
    *("ArtifactoryDetector", "AWSKeyDetector", "AzureStorageKeyDetector", "CloudantDetector"),
    *("DiscordBotTokenDetector", "GitHubTokenDetector", "GitLabTokenDetector", "JwtTokenDetector"),
    *("MailchimpDetector", "NpmDetector", "OpenAIDetector", "PrivateKeyDetector"),
    *("PypiTokenDetector", "SendGridDetector", "SlackDetector", "SquareOAuthDetector"),
    *("StripeDetector", "TelegramBotTokenDetector", "TwilioKeyDetector"),
)
SETTINGS = {"plugins_used": [{"name": name} for name in DETECTORS]}


def secrets_in(path: Path) -> list[str]:
    """`line: kind` of everything that looks like a secret."""
    with transient_settings(SETTINGS):
        return [f"{found.line_number}: {found.type}" for found in scan_file(str(path))]


def kept_files() -> list[Path]:
    """Files that git knows; all of them where this is no checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no checkout")
    names = listed.stdout.decode().split("\0")
    return [REPOSITORY / name for name in names if name and (REPOSITORY / name).is_file()]


def test_no_file_holds_a_secret() -> None:
    found = {str(path): secrets_in(path) for path in kept_files()}
    assert {path: secrets for path, secrets in found.items() if secrets} == {}


@pytest.mark.parametrize(
    "secret",
    [
        "AKIA" + "QWERTYUIOPASDFGH",
        "ghp_" + "a1B2c3D4e5" * 3 + "f6G7h8",
        "-----BEGIN RSA " + "PRIVATE KEY-----",
        "sk_live_" + "a1B2c3D4e5F6g7H8i9J0k1L2",
    ],
)
def test_a_secret_would_be_found(tmp_path: Path, secret: str) -> None:
    path = tmp_path / "settings.py"
    path.write_text(f'value = "{secret}"\n')
    assert secrets_in(path)
