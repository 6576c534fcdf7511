#!/bin/bash
DATA=/data
LR=6.0e-4
GPT_ARGS=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12
    --seq-length 2048 --max-position-embeddings 2048
    --tensor-model-parallel-size 1
    --micro-batch-size 4 --global-batch-size 256
    --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105
    --lr $LR --min-lr 6e-05 --lr-decay-style cosine
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --bf16 --use-flash-attn --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
)
DATA_ARGS=(
    --train-data-path 0.3 $DATA/a_text_document 0.7 ${DATA}/b_text_document
    --valid-data-path $DATA/v_text_document
    --tokenizer-type GPT2BPETokenizer
    --vocab-file $DATA/gpt2-vocab.json --merge-file $DATA/gpt2-merges.txt
    --save checkpoints/gpt3-125m --load checkpoints/gpt3-125m --save-interval 1000
    --eval-interval 1000 --eval-iters 10 --log-interval 10
)
torchrun pretrain_gpt.py "${GPT_ARGS[@]}" "${DATA_ARGS[@]}"
