"""What tool calls are watched for, unless a config says otherwise: test files.

Must not know: who searches, and in what. Invariant: linear in the searched text.
"""

WATCHED_PATTERN = (
    r"(?<![\w-])(?:(?:tests?|__tests__|specs?)/|(?:test_[\w-]*|conftest)\.py\b|(?:run_)?tests?\.sh\b)"
    r"|\w_test\.\w|\w\.(?:test|spec)\.[cm]?[jt]sx?\b"
)
