//! Experts that do not all fit the device: page-locked host memory holds every expert, the node's slots on the device some.
//!
//! In a Run the host reads which experts the tokens go to, fetches those that are missing, and launches the kernels of the
//! whole node with slots in the experts' stead. More experts than slots take several portions. How the work is cut changes no
//! sum: the results are, bit for bit, those of a node whose experts are all on the device.

use super::slots::{Missing, Slots, distinct};
use super::{Extras, FEW, Moe, PASS, Place, SMALL_ROWS, Sorted, Tokens};
use crate::cuda::{DevPtr, Device, Fetched, HostCx, HostStep, LaunchCx};
use crate::op::NodeLabel;
use crate::ops::gather::cuda::Rows;
use abi::cuda::{Event, Function};
use abi::{DType, Error, Result};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// The slots of one node.
pub(super) struct Offload {
    slots: Mutex<Slots>,
    count: usize,
    /// Behind all work that uses what is in them.
    last: Event,
    gather: Function,
}

impl Offload {
    /// `slots` slots that hold the first experts.
    pub fn new(device: &Device, experts: usize, slots: usize) -> Result<Arc<Self>> {
        let last = Event::new(device.context())?;
        let gather = Rows::function(device)?;
        Ok(Arc::new(Self { slots: Mutex::new(Slots::new(experts, slots)), count: slots, last, gather }))
    }

    /// Waits for all work that uses the slots.
    pub fn settle(&self) {
        // After an error of the device there is nothing to wait for.
        let _ = self.last.synchronize();
    }

    /// Writes down what a Run of `count` tokens does: route them all, and leave the rest to the host.
    pub fn launch(self: &Arc<Self>, moe: &Arc<Moe>, cx: &mut LaunchCx<'_>, count: usize) -> Result<()> {
        let pairs = count * moe.problem.routing.top;
        let tokens = Tokens { first: 0, count, ids: cx.scratch(pairs * 4), mix: cx.scratch(pairs * 4) };
        moe.push_route(cx, &tokens)?;
        let extras = moe.extras(cx);
        let mut own = extras;
        let rooms = own.each().zip(moe.extra_bytes());
        rooms.filter(|(at, _)| !at.is_null()).for_each(|(at, row)| *at = cx.scratch(self.count * row));
        let words = self.table_words(moe, count);
        let step = Step {
            offload: self.clone(),
            label: cx.label().clone(),
            place: moe.place(cx, count),
            tables: (cx.scratch(words * 4), words),
            moe: moe.clone(),
            tokens,
            extras,
            own,
        };
        cx.finish_on_host(Arc::new(step));
        Ok(())
    }

    /// Numbers that the host writes for a pass over some of `count` tokens, at most; see [`Tables`].
    fn table_words(&self, moe: &Moe, count: usize) -> usize {
        let (top, experts) = (moe.problem.routing.top, moe.problem.experts);
        let pairs = count.min(PASS) * top;
        let (portions, items) = match count {
            ..=FEW => (count, 0),
            _ => (experts.min(pairs).div_ceil(self.count), pairs.min(pairs / SMALL_ROWS + experts)),
        };
        let pieces = [pairs, 4 * items].into_iter().chain(std::iter::repeat_n(self.count, portions));
        pieces.map(|words| words.next_multiple_of(Tables::ALIGN)).sum()
    }
}

impl Extras {
    fn each(&mut self) -> impl Iterator<Item = &mut DevPtr> {
        self.biases.iter_mut().chain(&mut self.globals)
    }
}

impl Moe {
    /// Bytes of an expert's extras, in their order.
    fn extra_bytes(&self) -> impl Iterator<Item = usize> {
        let p = &self.problem;
        let biases = [p.fc1.n, p.fc2.n, p.inter].map(|n| n * self.element());
        biases.into_iter().chain([4, 4])
    }
}

/// The host's part of a node's work.
struct Step {
    moe: Arc<Moe>,
    offload: Arc<Offload>,
    label: NodeLabel,
    tokens: Tokens,
    place: Place,
    /// Where the tables of a pass lie, and the numbers there is room for.
    tables: (DevPtr, usize),
    /// By expert.
    extras: Extras,
    /// By slot.
    own: Extras,
}

/// What is done at a time: experts that have slots together.
struct Portion {
    missing: Vec<Missing>,
    /// Where the tables say which expert each slot holds.
    held: DevPtr,
    /// The tokens, or the items.
    range: Range<usize>,
}

/// Numbers on their way to the device.
struct Tables {
    words: Vec<u32>,
    at: DevPtr,
}

impl Tables {
    /// Items are read 16 bytes at a time.
    const ALIGN: usize = 4;

    fn add(&mut self, words: impl IntoIterator<Item = u32>) -> DevPtr {
        let at = self.at.plus(self.words.len() * 4);
        self.words.extend(words);
        self.words.resize(self.words.len().next_multiple_of(Self::ALIGN), 0);
        at
    }
}

impl HostStep for Step {
    fn run(&self, cx: &HostCx<'_>) -> Result<Fetched> {
        let routing = self.moe.problem.routing;
        let ids = cx.read(self.tokens.ids, self.tokens.count * routing.top)?;
        if let Some(wrong) = ids.iter().find(|&&id| id as usize >= self.moe.problem.experts) {
            return Err(Error::Internal(format!("{}: a token went to expert {wrong}", self.label)));
        }
        let mut slots = self.offload.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // Another stream may still read what is in the slots.
        cx.wait(&self.offload.last)?;
        let done = match self.tokens.count {
            ..=FEW => self.few(cx, &ids, &mut slots),
            _ => self.passes(cx, &ids, &mut slots),
        };
        let recorded = cx.record(&self.offload.last);
        if done.is_err() {
            // Some fetches may not have been queued.
            slots.clear();
        }
        recorded.and(done)
    }
}

impl Step {
    /// Few tokens: stretches of them whose experts have slots together.
    fn few(&self, cx: &HostCx<'_>, ids: &[u32], slots: &mut Slots) -> Result<Fetched> {
        let top = self.moe.problem.routing.top;
        let (mut tables, mut fetched) = (self.tables(), Fetched::default());
        let (mut portions, mut places) = (Vec::new(), Vec::with_capacity(ids.len()));
        for range in slots.stretches(ids, top) {
            let ids = &ids[range.start * top..range.end * top];
            portions.push(self.portion(&distinct(ids), range, slots, (&mut tables, &mut fetched)));
            places.extend(ids.iter().map(|&id| slots.place(id).expect("it has just got one")));
        }
        let places = tables.add(places);
        self.write(cx, &tables)?;
        for portion in portions {
            self.bring(cx, &portion)?;
            let (first, count) = (portion.range.start, portion.range.len());
            let at = |all: DevPtr| all.plus(first * top * 4);
            let tokens = Tokens { first, count, ids: at(places), mix: at(self.tokens.mix) };
            let place = self.moved(first);
            let inner = place.inner.plus(first * top * self.moe.problem.inter * self.moe.element());
            cx.launch(&self.label, |cx| {
                self.push_extras(cx, &portion)?;
                self.moe.push_few(cx, &tokens, self.tokens.count, &self.own, &Place { inner, ..place })
            })?;
        }
        Ok(fetched)
    }

    /// Many tokens, pass by pass.
    fn passes(&self, cx: &HostCx<'_>, ids: &[u32], slots: &mut Slots) -> Result<Fetched> {
        let top = self.moe.problem.routing.top;
        let mut fetched = Fetched::default();
        for (pass, ids) in ids.chunks(PASS * top).enumerate() {
            let (first, count) = (pass * PASS, ids.len() / top);
            let at = |all: DevPtr| all.plus(first * top * 4);
            let tokens = Tokens { first, count, ids: at(self.tokens.ids), mix: at(self.tokens.mix) };
            self.pass(cx, &tokens, ids, (slots, &mut fetched))?;
        }
        Ok(fetched)
    }

    /// One pass: the experts of each portion multiply their rows, then each token's products are summed.
    fn pass(
        &self,
        cx: &HostCx<'_>,
        tokens: &Tokens,
        ids: &[u32],
        (slots, fetched): (&mut Slots, &mut Fetched),
    ) -> Result<()> {
        let mut tables = self.tables();
        let mut pairs = vec![Vec::new(); self.moe.problem.experts];
        (0u32..).zip(ids).for_each(|(pair, &id)| pairs[id as usize].push(pair));
        let (rows, _) = self.moe.cut(tokens.count, cx.device());
        let (mut portions, mut order, mut items) = (Vec::new(), Vec::with_capacity(ids.len()), Vec::new());
        for wanted in slots.portions(ids) {
            let first = items.len();
            let mut portion = self.portion(&wanted, 0..0, slots, (&mut tables, fetched));
            for &expert in &wanted {
                let slot = slots.place(expert).expect("it has just got one");
                for rows in pairs[expert as usize].chunks(rows) {
                    items.push([slot, order.len() as u32, rows.len() as u32, 0]);
                    order.extend_from_slice(rows);
                }
            }
            portion.range = first..items.len();
            portions.push(portion);
        }
        let (order, items) = (tables.add(order), tables.add(items.into_iter().flatten()));
        self.write(cx, &tables)?;
        let place = self.moved(tokens.first);
        for portion in portions {
            self.bring(cx, &portion)?;
            let items = items.plus(portion.range.start * 16);
            let sorted = Sorted { order, items, rows, slots: portion.range.len() };
            cx.launch(&self.label, |cx| {
                self.push_extras(cx, &portion)?;
                self.moe.push_products(cx, &sorted, &self.own, &place)
            })?;
        }
        cx.launch(&self.label, |cx| self.moe.push_combine(cx, tokens, &place))
    }

    fn tables(&self) -> Tables {
        Tables { words: Vec::new(), at: self.tables.0 }
    }

    /// The place of the tokens from `first` on.
    fn moved(&self, first: usize) -> Place {
        self.place.from(first, self.moe.problem.hidden * self.moe.element())
    }

    /// Gives the experts `wanted` slots.
    fn portion(
        &self,
        wanted: &[u32],
        range: Range<usize>,
        slots: &mut Slots,
        (tables, fetched): (&mut Tables, &mut Fetched),
    ) -> Portion {
        let missing = slots.bring(wanted);
        fetched.hits += (wanted.len() - missing.len()) as u64;
        fetched.misses += missing.len() as u64;
        let bytes = self.moe.up.form.bytes() + self.moe.down.form.bytes();
        fetched.bytes += (missing.len() * bytes) as u64;
        Portion { missing, held: tables.add(slots.held()), range }
    }

    fn write(&self, cx: &HostCx<'_>, tables: &Tables) -> Result<()> {
        let (at, room) = self.tables;
        if tables.words.len() > room {
            let asked = tables.words.len();
            return Err(Error::Internal(format!("{}: tables of {asked} numbers in room for {room}", self.label)));
        }
        // SAFETY: the room is the node's scratch, and large enough.
        unsafe { cx.write(at, &tables.words) }
    }

    /// Queues the fetches.
    fn bring(&self, cx: &HostCx<'_>, portion: &Portion) -> Result<()> {
        for of in [&self.moe.up, &self.moe.down] {
            let missing = || Error::Internal(format!("{} has slots and no page-locked experts", self.label));
            let (source, bytes) = (of.source.as_ref().ok_or_else(missing)?, of.form.bytes());
            for &Missing { expert, slot } in &portion.missing {
                let to = of.weights.ptr().plus(slot * bytes);
                // SAFETY: both sides hold an expert there. The node outlives the copy (`Moe::drop`), nobody writes the
                // source, and whoever uses the slot's old expert is in front of it (`run`).
                unsafe { cx.fetch(to, source.at(expert * bytes, bytes), bytes)? };
            }
        }
        Ok(())
    }

    /// Brings the extras of the experts in the slots into the slots' order.
    fn push_extras(&self, cx: &mut LaunchCx<'_>, portion: &Portion) -> Result<()> {
        let (mut from, mut to) = (self.extras, self.own);
        let element = self.moe.element();
        for ((x, y), row) in from.each().zip(to.each()).zip(self.moe.extra_bytes()).filter(|((x, _), _)| !x.is_null()) {
            let count = self.offload.count;
            let rows = Rows { x: *x, y: *y, bytes: count * row, row, dim: self.moe.problem.experts, element };
            rows.push(cx, &self.offload.gather, portion.held, (count, DType::I32))?;
        }
        Ok(())
    }
}
