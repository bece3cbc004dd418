"""Stages and runs that turn field bytes into batches. No file here imports torch.

A stage describes a step and is picklable; a run executes that step in one process. A sample passes through these files:

    stage                               the protocols of stages and runs
    source                              the protocol of sources
    indexed_source                      samples by number, in the order of an epoch plan
    sequential_source                   whole shards, for data without an index
    mix, mix_streams                    weighted mixes of datasets
    pipeline                            source + stages: the only file that composes them
    decode, fast_decode, image_decode, raw_image_decode   field bytes -> values
    installed_decoders                  decoders of installed packages, by entry point
    map, stream_ops                     steps on single samples; shuffle, slice, repeat, compose
    batch, binning, group_batch, sequence_packing         samples -> batches

``bad_samples`` counts skipped samples, ``bad_sample_report`` lists them, ``step_signatures`` names steps in states.
"""

from shardstream.pipeline.stage import (
    Context,
    ItemFunction,
    ItemStage,
    Run,
    SourceRun,
    Stage,
    State,
)

__all__ = ["Context", "ItemFunction", "ItemStage", "Run", "SourceRun", "Stage", "State"]
