"""Tables of the store, by version. A file of an earlier version is migrated when it is opened."""

from __future__ import annotations

__all__ = ["APPLICATION_ID", "MIGRATIONS", "SCHEMA_VERSION"]

APPLICATION_ID = 0x74727376  # "trsv": in the header of each store file, to recognize files of other programs

# Each entry migrates a file from the version before. The first entry starts from an empty file. Never change an entry
# that was released: add another version instead.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # number: order of arrival, used by pages of lists. byte_count: bytes that count toward the limit, with the blob
        # and the row.
        """CREATE TABLE objects (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            kind TEXT NOT NULL,
            id TEXT NOT NULL,
            owner TEXT,
            created_at REAL NOT NULL,
            expires_at REAL NOT NULL,
            is_evictable INTEGER NOT NULL,
            byte_count INTEGER NOT NULL,
            blob_bytes INTEGER NOT NULL DEFAULT 0,
            body BLOB NOT NULL,
            UNIQUE (kind, id)
        ) STRICT""",
        "CREATE INDEX objects_by_owner ON objects (kind, owner, number)",
        "CREATE INDEX objects_by_end ON objects (expires_at)",
        "CREATE INDEX objects_to_evict ON objects (owner, number) WHERE is_evictable",
        """CREATE TABLE pieces (
            object INTEGER NOT NULL REFERENCES objects (number) ON DELETE CASCADE,
            offset INTEGER NOT NULL,
            data BLOB NOT NULL,
            PRIMARY KEY (object, offset)
        ) STRICT""",
    ),
)
SCHEMA_VERSION = len(MIGRATIONS)
