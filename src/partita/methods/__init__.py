"""Registry of federated methods.

Each method has one file and one card. To add a method, write both, add a reduction test and an entry in `INDEX`.
"""

from __future__ import annotations

from dataclasses import replace
