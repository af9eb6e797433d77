"""Removes secrets from what a debug bundle holds. Environment variables are left out unless they are known to help."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

REDACTED = "<redacted>"
"""Replaces a secret."""

_WORDS = r"(?:tokens?|secrets?|passwords?|passwd|pwd|passphrase|credentials?|cookie|authorization|(?:api|access|private|secret|account|auth)[-_]?key)"
_SECRET_NAME = re.compile(
    r"token|secret|pass|pwd|key|credential|cookie|auth|private|signature|jwt|bearer", re.IGNORECASE
)
"""Names of variables whose values are secret."""
_AT_LEAST = 6
"""Values of secret variables that are shorter are not searched for in other texts: they would be found everywhere."""

_DIGITS = 8
"""Nor are numbers with fewer digits, and names of files that exist."""

_HELPFUL = (
    *("HOLDFAST_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "TP_", "CUDA_", "OMP_", "MKL_", "KMP_", "OMPI_", "PRTE_", "PMIX_"),
    *("UCX_", "FI_", "MALLOC_", "SLURM_", "PET_", "GROUP_RANK", "ROLE_", "LOCAL_", "KUBERNETES_SERVICE_", "XDG_STATE_HOME"),
)  # fmt: skip
"""Beginnings of the names of variables that a bundle contains."""
_HELPFUL_NAMES = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", "LANG", "LC_ALL"),
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONFAULTHANDLER", "VIRTUAL_ENV", "CONDA_PREFIX", "SHELL", "TZ"),
)  # fmt: skip
"""Further names."""

# Every repetition is bounded, or begins at a rare character: a text of millions of letters without a space is quick, too.
_USER_IN_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]{1,19}://)[^\s/@\"'<>]+@", re.IGNORECASE)
_IN_QUERY = re.compile(rf"(?P<name>[?&][\w.-]{{0,40}}{_WORDS})=[^\s&\"'<>]+", re.IGNORECASE)
_BEARER = re.compile(r"\b(?P<scheme>bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?P<name>{_WORDS}\\?[\"']?\s{{0,4}}(?:[=:]\s{{0,4}}|\s(?=\S)))(?:(?P<quote>\\?[\"'])(?P<quoted>[^\"'\\\n]{{1,1000}})|(?P<bare>[^\s\"',;&\\]+))",
    re.IGNORECASE,
)
_IN_LIST = re.compile(rf"(?P<name>[\"']-[\w-]{{0,40}}{_WORDS}[\"'],\s*[\"'])[^\"']+", re.IGNORECASE)
_OPTION = re.compile(r"(?:^|[\s\"'])--?[\w-]{0,40}$")
"""The end of a text that is followed by the rest of an option's name."""
_NUMBER = re.compile(r"[\d.,]+(?:[eE][+-]?\d+)?")
_NOTHING = ("null", "None", "none", "true", "True", "false", "False", "[", "[]", "{", "{}")
_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


def helpful(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a bundle may contain, without secrets: an allow list, and its names that sound secret hidden."""
    shown = {n: v for n, v in environment.items() if n.startswith(_HELPFUL) or n in _HELPFUL_NAMES}
    return {name: REDACTED if _SECRET_NAME.search(name) else redact(value) for name, value in sorted(shown.items())}


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of variables whose names sound secret, the longest first: no other text may show them."""
    values = {v for name, v in environment.items() if _SECRET_NAME.search(name) and len(v) >= _AT_LEAST}
    plain = {v for v in values if os.path.exists(v) or (v.isdigit() and len(v) < _DIGITS)}
    return tuple(sorted(values - plain, key=len, reverse=True))


def redact(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Return a text without what looks like a secret.

    Replaced are ``secrets``; user and password in a URL; private keys; bearer tokens; and what is assigned to a name
    such as ``password`` or ``api_key``, in a command line, in JSON or in a log. Numbers of tokens stay.

    Args:
        text: The text.
        secrets: Values known to be secret.
    """
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    text = _KEY_BLOCK.sub(REDACTED, text)
    text = _USER_IN_URL.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _IN_QUERY.sub(rf"\g<name>={REDACTED}", text)
    text = _BEARER.sub(rf"\g<scheme> {REDACTED}", text)
    text = _IN_LIST.sub(rf"\g<name>{REDACTED}", text)
    return _ASSIGNED.sub(_hide_assigned, text)


def redactor(environment: Mapping[str, str]) -> Callable[[str], str]:
    """Return :func:`redact` with the secrets of an environment."""
    secrets = secrets_of(environment)
    return lambda text: redact(text, secrets)


def _hide_assigned(match: re.Match[str]) -> str:
    value, before = match["quoted"] or match["bare"], match.string[max(0, match.start() - 48) : match.start()]
    separated = match["name"].rstrip().endswith(("=", ":"))
    is_option = _OPTION.search(before) is not None and not value.startswith("-")
    is_count = _NUMBER.fullmatch(value) and match["name"].lower().startswith("token")
    if is_count or value in _NOTHING or value.startswith(REDACTED) or not (separated or is_option):
        return match[0]
    return f"{match['name']}{match['quote'] or ''}{REDACTED}"
