"""Where each millisecond of a case goes, and why one case beats another: as data, as text, in sentences."""
