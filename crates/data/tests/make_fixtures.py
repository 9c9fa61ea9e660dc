"""Writes the parquet files of the tests: python3 make_fixtures.py (pyarrow)."""

import datetime
import decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent / "fixtures"
HERE.mkdir(exist_ok=True)

gsm8k = pa.table({
    "question": [f"Ann has {n} apples and buys {n * 1000}. How many has she?" for n in range(40)],
    "answer": [f"{n} + {n * 1000} = {n * 1001}.\n#### {n * 1001:,}" for n in range(40)],
})
for codec in ["none", "snappy", "zstd", "gzip", "lz4", "brotli"]:
    pq.write_table(gsm8k, HERE / f"gsm8k-{codec}.parquet", compression=codec, row_group_size=25)

message = pa.struct([("role", pa.string()), ("content", pa.large_string())])
verl = pa.table({
    "data_source": pa.array(["math", "code", "math"]).dictionary_encode(),
    "prompt": pa.array([[{"role": "user", "content": f"What is {n}+{n}?"}] for n in range(3)], pa.list_(message)),
    "reward_model": pa.array([{"style": "rule", "ground_truth": str(2 * n)} for n in range(2)] + [None],
                             pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
    "big": pa.array([2**53 + 1, None, -1], pa.int64()),
    "score": pa.array([0.5, float("nan"), 1e300], pa.float64()),
    "tags": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int32())),
    "price": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("-2.25")], pa.decimal128(8, 2)),
    "at": pa.array([datetime.datetime(2026, 1, 2, 3, 4, 5)] * 3, pa.timestamp("ms")),
    "raw": pa.array([b"\x00\x01", None, b"abc"], pa.binary()),
    "__index_level_0__": pa.array([7, 8, 9], pa.int64()),
})
pq.write_table(verl, HERE / "verl.parquet")
image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
pq.write_table(pa.table({"prompt": ["look"], "picture": pa.array([{"bytes": b"x", "path": "a.png"}], image)}),
               HERE / "image.parquet")
