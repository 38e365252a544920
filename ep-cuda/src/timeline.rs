//! How far the device's streams are: what a freed block waits for before others may have it.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Events on streams.
pub trait Marks: Send + Sync {
    /// A stream.
    type Stream: Send + Sync;
    /// A point in a stream.
    type Event: Send;

    /// The point after all work of the stream so far, perhaps in an event that is no longer needed. `None` when none can
    /// be made now.
    fn record(&self, stream: &Self::Stream, spare: Option<Self::Event>) -> Option<Self::Event>;

    /// Whether the stream is past the point.
    fn passed(&self, event: &Self::Event) -> bool;

    /// Lets the host wait for the point.
    fn wait(&self, event: &Self::Event);
}

/// A live stream's name. A handle may come back for another stream, a key never does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamKey {
    handle: usize,
    id: u64,
}

/// All work of a stream up to some moment.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    /// The stream.
    pub stream: StreamKey,
    /// The stream's first event that comes after the work.
    event: u64,
}

/// The live streams of a device.
pub struct Timeline<T: Marks> {
    pub(crate) marks: T,
    tracks: Mutex<HashMap<usize, Track<T>>>,
    next_id: AtomicU64,
}

struct Track<T: Marks> {
    id: u64,
    /// How often the stream was added: callers may share a stream of their own.
    uses: usize,
    stream: Arc<T::Stream>,
    /// Number of events recorded, and of those known to be passed. They pass in order.
    recorded: u64,
    passed: u64,
    pending: VecDeque<T::Event>,
    spare: Vec<T::Event>,
}

impl<T: Marks> Track<T> {
    /// Makes sure that there is an event for the point; false when that cannot be now.
    fn record(&mut self, marks: &T, event: u64) -> bool {
        if self.recorded >= event {
            return true;
        }
        let Some(made) = marks.record(&self.stream, self.spare.pop()) else {
            return false;
        };
        self.pending.push_back(made);
        self.recorded += 1;
        true
    }

    fn poll(&mut self, marks: &T) {
        while self.pending.front().is_some_and(|event| marks.passed(event)) {
            self.spare.extend(self.pending.pop_front());
            self.passed += 1;
        }
    }
}

impl<T: Marks> Timeline<T> {
    /// A device without streams.
    pub fn new(marks: T) -> Self {
        Self { marks, tracks: Mutex::default(), next_id: AtomicU64::new(0) }
    }

    fn tracks(&self) -> MutexGuard<'_, HashMap<usize, Track<T>>> {
        self.tracks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a stream, once more if it is there already.
    pub fn add(&self, handle: usize, stream: Arc<T::Stream>) -> StreamKey {
        let mut tracks = self.tracks();
        let track = tracks.entry(handle).or_insert_with(|| Track {
            id: self.next_id.fetch_add(1, Ordering::Relaxed),
            uses: 0,
            stream,
            recorded: 0,
            passed: 0,
            pending: VecDeque::new(),
            spare: Vec::new(),
        });
        track.uses += 1;
        StreamKey { handle, id: track.id }
    }

    /// Takes back one [`Self::add`]. The caller has waited for the stream's work.
    pub fn remove(&self, stream: StreamKey) {
        let mut tracks = self.tracks();
        let Some(track) = tracks.get_mut(&stream.handle).filter(|track| track.id == stream.id) else {
            return;
        };
        track.uses -= 1;
        if track.uses == 0 {
            tracks.remove(&stream.handle);
        }
    }

    /// The live stream of this handle.
    pub fn find(&self, handle: usize) -> Option<(StreamKey, Arc<T::Stream>)> {
        self.tracks().get(&handle).map(|track| (StreamKey { handle, id: track.id }, track.stream.clone()))
    }

    /// The work so far of one stream; to be marked when somebody asks.
    pub fn point(&self, stream: StreamKey) -> Option<Point> {
        let tracks = self.tracks();
        let track = tracks.get(&stream.handle).filter(|track| track.id == stream.id)?;
        Some(Point { stream, event: track.recorded + 1 })
    }

    /// The work so far of all streams, marked at once.
    pub fn points(&self) -> Vec<Point> {
        let mut tracks = self.tracks();
        let point = |(&handle, track): (&usize, &mut Track<T>)| {
            track.poll(&self.marks);
            let event = track.recorded + 1;
            track.record(&self.marks, event);
            Point { stream: StreamKey { handle, id: track.id }, event }
        };
        tracks.iter_mut().map(point).collect()
    }

    /// Marks the work so far of all streams, and shows each event.
    ///
    /// # Errors
    /// Those of `show`.
    pub fn mark_all<E>(&self, mut show: impl FnMut(&T::Event) -> Result<(), E>) -> Result<(), E> {
        let mut tracks = self.tracks();
        for track in tracks.values_mut() {
            track.poll(&self.marks);
            if track.record(&self.marks, track.recorded + 1) {
                track.pending.back().map_or(Ok(()), &mut show)?;
            }
        }
        Ok(())
    }

    /// Whether the work is done.
    pub fn passed(&self, point: &Point) -> bool {
        let mut tracks = self.tracks();
        let Some(track) = tracks.get_mut(&point.stream.handle).filter(|track| track.id == point.stream.id) else {
            return true;
        };
        track.passed >= point.event || {
            let marked = track.record(&self.marks, point.event);
            track.poll(&self.marks);
            marked && track.passed >= point.event
        }
    }

    /// Waits for the work; false when it cannot be waited for now.
    pub fn wait(&self, point: &Point) -> bool {
        // Under the lock: this is for the rare moments when memory is short.
        let mut tracks = self.tracks();
        let Some(track) = tracks.get_mut(&point.stream.handle).filter(|track| track.id == point.stream.id) else {
            return true;
        };
        if track.passed < point.event && track.record(&self.marks, point.event) {
            let ahead = usize::try_from(point.event - track.passed - 1).expect("a count of events in memory");
            if let Some(event) = track.pending.get(ahead) {
                self.marks.wait(event);
            }
            track.poll(&self.marks);
        }
        track.passed >= point.event
    }
}
