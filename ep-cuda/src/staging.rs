//! Copies from and to pageable host memory, by way of a little page-locked memory.
//!
//! The caller's memory is its own again when a call returns: an upload is read at once and copied by the device later, a
//! download is waited for. While the device copies one slot the host fills or empties another.

use abi::Result;
use std::collections::VecDeque;
use std::ptr::NonNull;

/// Bytes of a slot.
pub const SLOT: usize = 1 << 20;
/// Slots of a ring.
pub const SLOTS: usize = 4;
/// Pieces in a slot start at multiples of this.
const ALIGN: usize = 256;

/// A stream, as far as copies go.
pub trait Lane {
    /// A point in the stream.
    type Mark;

    /// Queues a copy to the device.
    ///
    /// # Safety
    /// Both sides have `len` bytes, and nobody else writes them until the copy is done; `src` is page-locked.
    unsafe fn to_device(&self, dst: u64, src: *const u8, len: usize) -> Result<()>;

    /// Queues a copy from the device.
    ///
    /// # Safety
    /// Both sides have `len` bytes, and nobody else uses `dst` until the copy is done; `dst` is page-locked.
    unsafe fn to_host(&self, dst: *mut u8, src: u64, len: usize) -> Result<()>;

    /// The point after all work so far, perhaps in a mark that is no longer needed.
    ///
    /// # Errors
    /// When there can be none.
    fn mark(&self, spare: Option<Self::Mark>) -> Result<Self::Mark>;

    /// Waits for a point, perhaps of another stream.
    ///
    /// # Errors
    /// When work before it failed.
    fn wait(&self, mark: &Self::Mark) -> Result<()>;
}

/// A ring of page-locked slots.
pub struct Ring<K> {
    slots: [Slot<K>; SLOTS],
    /// The slot that is being filled.
    current: usize,
    /// Downloads to finish, oldest first.
    downloads: VecDeque<Download>,
}

struct Slot<K> {
    memory: NonNull<u8>,
    filled: usize,
    /// What must be done before the slot is free again, when the slot is full.
    mark: Option<K>,
    spare: Option<K>,
}

struct Download {
    slot: usize,
    offset: usize,
    dst: *mut u8,
    len: usize,
}

// SAFETY: the slots' memory belongs to the ring. The addresses of `downloads` are used within a batch of copies, which
// one thread makes; between batches there are none.
unsafe impl<K: Send> Send for Ring<K> {}

impl<K> Ring<K> {
    /// A ring over page-locked memory.
    ///
    /// # Safety
    /// `memory` has `SLOTS * SLOT` bytes that the ring alone uses from now on, as long as it lives and as long as
    /// queued copies run.
    pub unsafe fn new(memory: NonNull<u8>) -> Self {
        let slot = |i| {
            // SAFETY: in bounds, as the caller vouches.
            let memory = unsafe { memory.add(i * SLOT) };
            Slot { memory, filled: 0, mark: None, spare: None }
        };
        Self { slots: std::array::from_fn(slot), current: 0, downloads: VecDeque::new() }
    }

    /// Queues a copy to the device; `src` has been read on return.
    ///
    /// # Safety
    /// `src` can be read, `dst` is device memory of `len` bytes that nobody else writes until the copy is done.
    pub unsafe fn upload<L: Lane<Mark = K>>(&mut self, lane: &L, dst: u64, src: *const u8, len: usize) -> Result<()> {
        // The source might be what a download of this batch writes.
        self.finish_downloads(lane)?;
        let mut done = 0;
        while done < len {
            let (i, offset, piece) = self.room(lane, len - done)?;
            // SAFETY: the piece lies in the slot, which no work uses; the rest is the caller's promise.
            unsafe {
                let at = self.slots[i].memory.add(offset).as_ptr();
                std::ptr::copy_nonoverlapping(src.add(done), at, piece);
                lane.to_device(dst + done as u64, at, piece)?;
            }
            done += piece;
        }
        Ok(())
    }

    /// Queues a copy from the device; `dst` is written by [`Self::finish`] at the latest.
    ///
    /// # Safety
    /// `dst` can be written until [`Self::finish`] returns or the ring is dropped, `src` is device memory of `len`
    /// bytes.
    pub unsafe fn download<L: Lane<Mark = K>>(&mut self, lane: &L, dst: *mut u8, src: u64, len: usize) -> Result<()> {
        let mut done = 0;
        while done < len {
            let (slot, offset, piece) = self.room(lane, len - done)?;
            // SAFETY: the piece lies in the slot, which no work uses; the rest is the caller's promise.
            let dst = unsafe {
                lane.to_host(self.slots[slot].memory.add(offset).as_ptr(), src + done as u64, piece)?;
                dst.add(done)
            };
            self.downloads.push_back(Download { slot, offset, dst, len: piece });
            done += piece;
        }
        Ok(())
    }

    /// Ends the batch of copies on this stream: all downloads are done, uploads are queued.
    ///
    /// # Errors
    /// When a copy failed.
    pub fn finish<L: Lane<Mark = K>>(&mut self, lane: &L) -> Result<()> {
        let finished = self.finish_downloads(lane);
        self.downloads.clear();
        finished.and(self.seal(lane))
    }

    /// Room in a slot for up to `want` bytes, the more the better: the slot, the place in it, the number of bytes.
    fn room<L: Lane<Mark = K>>(&mut self, lane: &L, want: usize) -> Result<(usize, usize, usize)> {
        let slot = &self.slots[self.current];
        // A small piece is not split, and a slot that an earlier batch used is not waited for.
        if slot.mark.is_some() || SLOT - slot.filled < want.min(SLOT / 4) {
            self.seal(lane)?;
            self.current = (self.current + 1) % SLOTS;
            self.empty(lane, self.current)?;
        }
        let slot = &mut self.slots[self.current];
        let (offset, piece) = (slot.filled, want.min(SLOT - slot.filled));
        slot.filled = (offset + piece).next_multiple_of(ALIGN);
        Ok((self.current, offset, piece))
    }

    /// Marks the end of what the current slot is used for.
    fn seal<L: Lane<Mark = K>>(&mut self, lane: &L) -> Result<()> {
        let slot = &mut self.slots[self.current];
        if slot.filled > 0 && slot.mark.is_none() {
            slot.mark = Some(lane.mark(slot.spare.take())?);
        }
        Ok(())
    }

    /// Waits until a slot is free, and delivers what was downloaded to it.
    fn empty<L: Lane<Mark = K>>(&mut self, lane: &L, i: usize) -> Result<()> {
        let slot = &mut self.slots[i];
        if let Some(mark) = slot.mark.take() {
            lane.wait(&mark)?;
            slot.spare = Some(mark);
        }
        slot.filled = 0;
        // Slots are emptied in the order in which they were filled.
        while self.downloads.front().is_some_and(|download| download.slot == i) {
            let Download { offset, dst, len, .. } = self.downloads.pop_front().expect("there is one");
            // SAFETY: the device has written the piece, and `dst` may be written: the caller of `download` promised.
            unsafe { std::ptr::copy_nonoverlapping(self.slots[i].memory.add(offset).as_ptr(), dst, len) };
        }
        Ok(())
    }

    fn finish_downloads<L: Lane<Mark = K>>(&mut self, lane: &L) -> Result<()> {
        if self.downloads.is_empty() {
            return Ok(());
        }
        self.seal(lane)?;
        while let Some(Download { slot, .. }) = self.downloads.front() {
            self.empty(lane, *slot)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "staging_tests.rs"]
mod tests;
