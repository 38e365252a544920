//! Output shapes, and every check that shapes alone decide.

use super::{Attrs, slot};
use crate::fact::{Fact, div, mul, unify};
use crate::op::NodeCx;
use abi::{Dim, HostTensor, Result};

/// Facts of output, present_key and present_value.
pub(super) fn infer(cx: &NodeCx) -> Result<Vec<Fact>> {
    let attrs = Attrs::parse(cx).map_err(|d| abi::Error::Internal(d.0))?;
    let query = cx.required(slot::QUERY)?;
    let dtype = query.dtype;
    let (batch, rows) = (rank(cx, slot::QUERY, "query", 3)?, query.dim(1));
    let batch = match batch {
        true => query.dim(0),
        false => Dim::Unknown,
    };
    let packed = !cx.has_input(slot::KEY);
    let parts = attrs.heads + if packed { 2 * attrs.kv_heads } else { 0 };
    let head = head_size(cx, query, parts)?;
    let new_rows = new_rows(cx, &attrs, &batch, &rows, &head)?;
    check_past(cx, &attrs, &batch, &head)?;
    check_lengths(cx, &batch)?;
    let capacity = present(cx, &attrs, &rows, &new_rows)?;
    check_rotary(cx, &attrs, &batch, &rows, &head)?;
    check_rest(cx, &attrs, &batch, &rows, &head)?;
    let hidden = mul(&Dim::Known(attrs.heads), &head);
    let cache = vec![batch.clone(), Dim::Known(attrs.kv_heads), capacity, head];
    Ok(vec![Fact::new(dtype, vec![batch, rows, hidden]), Fact::new(dtype, cache.clone()), Fact::new(dtype, cache)])
}

/// Whether one count of tokens is as good as another: the past holds both, both are a first prompt or neither is, and no
/// check fails for either.
pub(super) fn steady(cx: &NodeCx, slot: usize, old: &Fact) -> bool {
    let known = |s: usize, axis: isize| cx.input(s).and_then(|fact| fact.dim(axis).known());
    let (Some(new), Some(rows), Some(past)) = (cx.input(slot), known(slot::QUERY, 1), known(slot::PAST_KEY, 2)) else {
        return false;
    };
    let most = known(slot::COS, 0).map_or(past, |angles| past.min(angles));
    let count = |fact: &Fact| {
        let value = fact.value.as_ref().and_then(HostTensor::as_slice::<i32>).filter(|value| value.len() == 1)?;
        usize::try_from(value[0]).ok().filter(|t| (rows.max(1)..=most).contains(t))
    };
    let both = count(old).zip(count(new));
    let alike = both.is_some_and(|(old, new)| (old == rows) == (new == rows));
    slot == slot::TOTAL && old.shape == new.shape && alike && !cx.has_input(slot::BIAS)
}

fn input(slot: usize, name: &str) -> String {
    format!("input {slot} ({name})")
}

/// Errs unless the rank is unknown (false) or `n` (true).
fn rank(cx: &NodeCx, slot: usize, name: &str, n: usize) -> Result<bool> {
    match cx.input(slot).and_then(Fact::rank) {
        None => Ok(false),
        Some(got) if got == n => Ok(true),
        Some(got) => Err(cx.error(input(slot, name), format_args!("{got} dimensions"), format_args!("{n} dimensions"))),
    }
}

/// Errs when dim `axis` of input `slot` is known to differ from `expected`.
fn same(cx: &NodeCx, slot: usize, name: &str, axis: isize, expected: &Dim, what: &str) -> Result<()> {
    let Some(fact) = cx.input(slot) else { return Ok(()) };
    let got = fact.dim(axis);
    match (&got, expected) {
        (Dim::Known(a), Dim::Known(b)) if a != b => {
            Err(cx.error(input(slot, name), format_args!("dimension {axis} of {a}"), format_args!("{b}, the {what}")))
        }
        _ => Ok(()),
    }
}

fn head_size(cx: &NodeCx, query: &Fact, parts: usize) -> Result<Dim> {
    let head = match query.dim(2) {
        Dim::Known(d) if d == 0 || d % parts != 0 => {
            return Err(cx.error(
                input(slot::QUERY, "query"),
                format_args!("a hidden size of {d}"),
                format_args!("a multiple of its {parts} heads"),
            ));
        }
        d => div(&d, parts),
    };
    let past = cx.input(slot::PAST_KEY).map_or(Dim::Unknown, |f| f.dim(3));
    unify(&head, &past).ok_or_else(|| {
        cx.error(
            input(slot::PAST_KEY, "past_key"),
            format_args!("a head size of {}", past.known().unwrap_or(0)),
            format_args!("{}, the query's head size", head.known().unwrap_or(0)),
        )
    })
}

/// L: S when packed.
fn new_rows(cx: &NodeCx, attrs: &Attrs, batch: &Dim, rows: &Dim, head: &Dim) -> Result<Dim> {
    if !cx.has_input(slot::KEY) {
        return Ok(rows.clone());
    }
    let hidden = mul(&Dim::Known(attrs.kv_heads), head);
    for (s, name) in [(slot::KEY, "key"), (slot::VALUE, "value")] {
        rank(cx, s, name, 3)?;
        same(cx, s, name, 0, batch, "batch size")?;
        same(cx, s, name, 2, &hidden, "product of kv_num_heads and the query's head size")?;
    }
    let new_rows = cx.required(slot::KEY)?.dim(1);
    same(cx, slot::VALUE, "value", 1, &new_rows, "key's sequence length")?;
    match (&new_rows, rows) {
        (Dim::Known(0), _) if cx.has_input(slot::PAST_KEY) => {}
        (Dim::Known(l), Dim::Known(s)) if l != s => {
            return Err(cx.error(
                input(slot::KEY, "key"),
                format_args!("a sequence length of {l}"),
                format_args!("{s}, the query's (or 0 with past_key: nothing to append)"),
            ));
        }
        _ => {}
    }
    Ok(new_rows)
}

fn check_past(cx: &NodeCx, attrs: &Attrs, batch: &Dim, head: &Dim) -> Result<()> {
    for (s, name) in [(slot::PAST_KEY, "past_key"), (slot::PAST_VALUE, "past_value")] {
        rank(cx, s, name, 4)?;
        same(cx, s, name, 0, batch, "batch size")?;
        same(cx, s, name, 1, &Dim::Known(attrs.kv_heads), "kv_num_heads")?;
        same(cx, s, name, 3, head, "head size")?;
    }
    let capacity = cx.input(slot::PAST_KEY).map_or(Dim::Unknown, |f| f.dim(2));
    same(cx, slot::PAST_VALUE, "past_value", 2, &capacity, "capacity of past_key")?;
    if let (true, Some(c)) = (attrs.window_cache, capacity.known())
        && c < attrs.window
    {
        return Err(cx.error(
            input(slot::PAST_KEY, "past_key"),
            format_args!("a capacity of {c}"),
            format_args!("at least local_window_size, which is {}", attrs.window),
        ));
    }
    Ok(())
}

fn check_lengths(cx: &NodeCx, batch: &Dim) -> Result<()> {
    let lengths = cx.required(slot::SEQLENS)?.elements();
    if let (Some(got), Dim::Known(b)) = (lengths, batch)
        && got != *b
    {
        return Err(cx.error(
            input(slot::SEQLENS, "seqlens_k"),
            format_args!("{got} elements"),
            format_args!("{b}, one for each batch entry"),
        ));
    }
    match cx.required(slot::TOTAL)?.elements() {
        Some(got) if got != 1 => {
            Err(cx.error(input(slot::TOTAL, "total_sequence_length"), format_args!("{got} elements"), "one element"))
        }
        _ => Ok(()),
    }
}

/// C: the past's capacity where that already holds all tokens, else past and new tokens together.
fn present(cx: &NodeCx, attrs: &Attrs, rows: &Dim, new_rows: &Dim) -> Result<Dim> {
    let past = match cx.input(slot::PAST_KEY) {
        None => Dim::Known(0),
        Some(fact) => fact.dim(2),
    };
    let total = match cx.required(slot::TOTAL)?.ints().as_deref() {
        Some(&[total]) => total,
        _ if attrs.window_cache => return Ok(past),
        // Where there is no past it can only be the new tokens.
        _ if past == Dim::Known(0) => return Ok(new_rows.clone()),
        _ => return Ok(Dim::Unknown),
    };
    let error = |expected: String| cx.error(input(slot::TOTAL, "total_sequence_length"), total, expected);
    let total = usize::try_from(total).ok().filter(|&t| t > 0).ok_or_else(|| error("more than 0".into()))?;
    if attrs.window_cache {
        return Ok(past);
    }
    if let Dim::Known(s) = rows
        && total < *s
    {
        return Err(error(format!("at least the query's sequence length, which is {s}")));
    }
    match (past, new_rows) {
        (Dim::Known(p), _) if total <= p => Ok(Dim::Known(p)),
        (Dim::Known(p), Dim::Known(l)) if total != p + l => Err(error(format!(
            "at most {p}, the past's capacity (shared buffer), or {}, past and new tokens together",
            p + l
        ))),
        (Dim::Known(_), _) => Ok(Dim::Known(total)),
        _ => Ok(Dim::Unknown),
    }
}

fn check_rotary(cx: &NodeCx, attrs: &Attrs, batch: &Dim, rows: &Dim, head: &Dim) -> Result<()> {
    for (s, name) in [(slot::COS, "cos_cache"), (slot::SIN, "sin_cache")] {
        rank(cx, s, name, 2)?;
        if let (true, Some(Dim::Known(half)), Dim::Known(h)) = (attrs.rotary, cx.input(s).map(|f| f.dim(1)), head)
            && 2 * half > *h
        {
            return Err(cx.error(
                input(s, name),
                format_args!("dimension 1 of {half}"),
                format_args!("at most half of the head size, which is {h}"),
            ));
        }
    }
    if let Some(cos) = cx.input(slot::COS) {
        same(cx, slot::SIN, "sin_cache", 0, &cos.dim(0), "dimension of cos_cache")?;
        same(cx, slot::SIN, "sin_cache", 1, &cos.dim(1), "dimension of cos_cache")?;
    }
    let total = total(cx);
    if let (true, Some(Dim::Known(rows)), Dim::Known(t)) = (attrs.rotary, cx.input(slot::COS).map(|f| f.dim(0)), &total)
        && rows < *t
    {
        let got = format_args!("{rows} rows");
        return Err(cx.error(input(slot::COS, "cos_cache"), got, format_args!("at least total_sequence_length, {t}")));
    }
    rank(cx, slot::POSITIONS, "position_ids", 2)?;
    same(cx, slot::POSITIONS, "position_ids", 0, batch, "batch size")?;
    match (cx.input(slot::POSITIONS).map(|f| f.dim(1)), rows) {
        (Some(Dim::Known(got)), Dim::Known(s)) if got < *s => Err(cx.error(
            input(slot::POSITIONS, "position_ids"),
            format_args!("dimension 1 of {got}"),
            format_args!("at least {s}, the query's sequence length"),
        )),
        _ => Ok(()),
    }
}

fn check_rest(cx: &NodeCx, attrs: &Attrs, batch: &Dim, rows: &Dim, head: &Dim) -> Result<()> {
    let heads = Dim::Known(attrs.heads);
    rank(cx, slot::SINK, "head_sink", 1)?;
    same(cx, slot::SINK, "head_sink", 0, &heads, "number of heads")?;
    for (s, name) in [(slot::Q_NORM, "q_norm_weight"), (slot::K_NORM, "k_norm_weight")] {
        rank(cx, s, name, 1)?;
        same(cx, s, name, 0, head, "head size")?;
    }
    let Some(bias) = cx.input(slot::BIAS) else {
        return Ok(());
    };
    rank(cx, slot::BIAS, "attention_bias", 4)?;
    let broadcast = |axis, dim: &Dim, what| match bias.dim(axis) {
        Dim::Known(1) => Ok(()),
        _ => same(cx, slot::BIAS, "attention_bias", axis, dim, what),
    };
    broadcast(0, batch, "batch size (or 1)")?;
    broadcast(1, &heads, "number of heads (or 1)")?;
    same(cx, slot::BIAS, "attention_bias", 2, rows, "query's sequence length")?;
    let total = total(cx);
    same(cx, slot::BIAS, "attention_bias", 3, &total, "total_sequence_length")
}

/// The value of total_sequence_length, where it is known.
fn total(cx: &NodeCx) -> Dim {
    let value = cx.input(slot::TOTAL).and_then(Fact::ints);
    match value.as_deref() {
        Some(&[t]) => usize::try_from(t).map_or(Dim::Unknown, Dim::Known),
        _ => Dim::Unknown,
    }
}
