#!/bin/bash
MODEL_ARGS=(
   --swiglu
   --num-layers 32
   --hidden-size 4096
   --ffn-hidden-size 14336
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --max-position-embeddings 8192
   --seq-length 8192
   --position-embedding-type rope
   --rotary-base 500000
   --rotary-percent 1.0
   --normalization "RMSNorm"
   --norm-epsilon 1e-5
   --disable-bias-linear
   --untie-embeddings-and-output-weights
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --init-method-std 0.0134
)
TRAINING_ARGS=(
   --micro-batch-size 1
   --global-batch-size 128
   --train-iters 100000
   --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --lr-warmup-iters 500
   --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
   --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --manual-gc
   --context-parallel-size 2 --tensor-model-parallel-size 2
   --tokenizer-type NullTokenizer --vocab-size 128256
   --data-path /data/all_text_document --split 100,0,0
   --seed 7
)
