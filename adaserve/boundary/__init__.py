"""What a request may contain: pure checks, without SGLang, of everything that a client may send.

``patches.http.validation`` asks them on every route before a request is queued. A number that SGLang or a
kernel would use as an index or put into 32 bits is checked here, so that no later code has to check it again.
"""

from adaserve.boundary.errors import RequestError
from adaserve.boundary.limits import Limits
from adaserve.boundary.request import (
    OF_MEDIA,
    check_all_logprobs,
    check_all_prompts,
    check_logprobs,
    check_prompt,
    check_request,
)

__all__ = [
    "OF_MEDIA",
    "Limits",
    "RequestError",
    "check_all_logprobs",
    "check_all_prompts",
    "check_logprobs",
    "check_prompt",
    "check_request",
]
