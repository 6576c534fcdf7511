# The arguments of pretrain_gpt.py that the guide trains with, and what it leaves out: a place to save to. Its comment
# says 39B, but 36 layers of 4096 are the 7.5B row of its table. Read by ingot as it stands; any of them can be
# changed after the file's name, as in `num_layers=24`.
MEGATRON_ARGS=(
  --num-layers 36 --hidden-size 4096 --num-attention-heads 32
  --seq-length 2048 --max-position-embeddings 2048
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2
  --micro-batch-size 1 --global-batch-size 288
  --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105
  --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
  --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
  --bf16 --recompute-activations
  --log-interval 1 --eval-iters 40 --eval-interval 1000
  --data-path gpt2/my-gpt2_text_document --split 98,2,0
  --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
  --save gpt3-7.5b --load gpt3-7.5b --save-interval 500
)
