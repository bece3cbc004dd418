"""Torch datasets and the loader: workers, batches, state.

A batch passes through these files:

    dataset, map_dataset, object_dataset, mix_dataset   public datasets; their methods are in ``steps``
    loader, option_checks           the loader in the main process; checks of its options
    rank_consistency                compare the order of samples between ranks
    worker, replacement_samples     make the batches of one rank in a worker process
    collation                       samples -> tensors
    serialize, shared_memory, message_batching   send batches from a worker to the main process
    worker_errors                   report a worker that died
    iterator, state, stats          position, saved state and timing of an epoch
    checkpoint                      save and load training checkpoints

``accelerate`` adapts a loader to Hugging Face Accelerate's ``prepare``.
"""
