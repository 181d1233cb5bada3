"""Pictures in conversations: rendered by templates of both kinds, kept with their turns, sent with samples."""

import asyncio

import pytest
from test_session import make_session
