# SPDX-License-Identifier: BSL-1.0
"""What stands behind scripts/bench. `plan` and `run` measure, `machine` says on what; `results` reads what was found, by `names`; `estimates`,
`tables`, `goals`, `charts` and `compare` make something of it, which `page` and `docs` show."""


class BadInput(Exception):
    """The user's input is unusable; the text is one sentence that says why."""
