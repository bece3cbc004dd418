"""The benchmark."""
from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import statistics
from benchmarks import rows
from benchmarks.targets import rate
from benchmarks.work import Work

def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append")
    parser.add_argument("--contestants")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--work", default=str(Path(tempfile.gettempdir()) / "shardstream-bench"))
    parser.add_argument("--interpreter", action="append", default=[])
    a = parser.parse_args()
    sizes = rows.QUICK if a.quick else rows.FULL
    folder = Path(a.work); folder.mkdir(parents=True, exist_ok=True)
    work = Work(folder, interpreters=dict(i.split("=", 1) for i in a.interpreter))
    try:
        for setting in rows.settings(sizes):
            if a.only and setting.row not in a.only: continue
            names = [n for n in (*setting.contestants, setting.limit) if n and (not a.contestants or n in a.contestants.split(",") or n.startswith("limit"))]
            cases = {n: rows.place(setting, n, sizes, work) for n in names}
            results = {n: [] for n in names}
            for rep in range(a.repetitions or sizes.repetitions):
                for n, case in cases.items():
                    if results[n] and results[n][-1].wrong: continue
                    server = None if setting.store == "local" else work.server(slow=setting.store == "s3-slow")
                    results[n].append(work.measure(rows._with(case, max_s=0.0 if rep == 0 or setting.store != 'local' else 2.0), server=server))
            print("==", setting.name)
            sound = {n: [r for r in f if not r.wrong] for n, f in results.items()}
            for n, f in sound.items():
                if not f: print(f"{n:20} {results[n][-1].wrong[:150]}"); continue
                rates = [rate(r) for r in f]
                gb = f[0].payload_bytes / 1e9
                print(f"{n:20}{statistics.median(rates):12,.0f}/s ({min(rates):,.0f}-{max(rates):,.0f}) {statistics.median(r.payload_bytes / r.seconds for r in f)/1e6:8.0f} MB/s  cpu {statistics.median(r.cpu_s / (r.payload_bytes/1e9) for r in f):.2f} s/GB")
            for t in setting.targets:
                got = t.reached(sound)
                print("   target", t.text, t.wanted, "->", got and round(got, 2), "met" if got and t.is_met(got) else "NOT MET", flush=True)
    finally:
        work.close()

main()
