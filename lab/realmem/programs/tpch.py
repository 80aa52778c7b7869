"""TPC-H at scale factor 1 in DuckDB, in memory, one thread. A unit: its 22 queries in order."""

import pathlib

import duckdb
import duckdb_extension_tpch

from unit import checksum, repeat

extension = next(pathlib.Path(duckdb_extension_tpch.__file__).parent.glob("extensions/*/tpch.duckdb_extension"))
database = duckdb.connect(":memory:", config={"threads": 1, "allow_unsigned_extensions": True})
database.execute(f"LOAD '{extension}'")
database.execute("CALL dbgen(sf=1)")


def queries():
    # Sums of floating point depend on the order of their terms, which one thread keeps.
    return checksum(*(database.execute(f"PRAGMA tpch({number})").fetchall() for number in range(1, 23)))


repeat(queries)
