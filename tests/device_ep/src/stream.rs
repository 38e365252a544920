//! Streams with a worker thread each, slow on purpose: whoever forgets to wait reads poison.

use abi::ort::{MemoryDevice, Notification, Stream, StreamRef, StreamSource};
use abi::{Error, Result};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

/// How long each piece of work is held back.
const DELAY: Duration = Duration::from_micros(300);

type Work = Box<dyn FnOnce() + Send>;

/// A queue of work, done in order by a thread of its own.
pub struct Queue {
    sender: Mutex<Sender<Work>>,
    progress: Arc<Progress>,
}

/// How far a queue is.
#[derive(Default)]
struct Progress {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Default)]
struct Counts {
    queued: u64,
    done: u64,
    panic: Option<String>,
}

/// A point in a queue.
#[derive(Clone)]
pub struct Ticket {
    progress: Arc<Progress>,
    number: u64,
}

impl Ticket {
    /// Whether the work up to here is done.
    pub fn done(&self) -> bool {
        self.progress.counts.lock().expect("no panic while locked").done >= self.number
    }

    /// Waits for the work up to here.
    pub fn wait(&self) -> Result<()> {
        let counts = self.progress.counts.lock().expect("no panic while locked");
        let waiting = |counts: &mut Counts| counts.done < self.number;
        let mut counts = self.progress.changed.wait_while(counts, waiting).expect("no panic while locked");
        counts.panic.take().map_or(Ok(()), |panic| Err(Error::Internal(panic)))
    }
}

impl Queue {
    fn new() -> Self {
        let (sender, receiver) = channel::<Work>();
        let progress = Arc::<Progress>::default();
        let mine = progress.clone();
        std::thread::spawn(move || {
            for work in receiver {
                std::thread::sleep(DELAY);
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                let mut counts = mine.counts.lock().expect("no panic while locked");
                counts.done += 1;
                if let Err(payload) = result {
                    let text = payload.downcast_ref::<String>().cloned();
                    counts.panic = Some(text.unwrap_or_else(|| "panic on the stream".into()));
                }
                mine.changed.notify_all();
            }
        });
        Self { sender: Mutex::new(sender), progress }
    }

    /// Adds work.
    pub fn push(&self, work: impl FnOnce() + Send + 'static) {
        let sender = self.sender.lock().expect("no panic while locked");
        self.progress.counts.lock().expect("no panic while locked").queued += 1;
        sender.send(Box::new(work)).expect("the worker lives as long as the sender");
    }

    /// The point after all work so far.
    pub fn ticket(&self) -> Ticket {
        let number = self.progress.counts.lock().expect("no panic while locked").queued;
        Ticket { progress: self.progress.clone(), number }
    }
}

/// Live queues by the handle that ORT passes around.
static QUEUES: Mutex<Option<HashMap<usize, Weak<Queue>>>> = Mutex::new(None);

/// The points after all work of all streams so far.
pub fn live_tickets() -> Vec<Ticket> {
    let queues = QUEUES.lock().expect("no panic while locked");
    queues.iter().flatten().filter_map(|(_, queue)| Some(queue.upgrade()?.ticket())).collect()
}

/// The queue behind a stream's handle; `None` for null.
pub fn queue_of(handle: *mut c_void) -> Option<Arc<Queue>> {
    let queues = QUEUES.lock().expect("no panic while locked");
    queues.as_ref()?.get(&handle.addr())?.upgrade()
}

/// A stream as ORT sees it.
pub struct DeviceStream {
    pub queue: Arc<Queue>,
}

impl Stream for DeviceStream {
    fn handle(&self) -> *mut c_void {
        Arc::as_ptr(&self.queue).cast_mut().cast()
    }

    fn notification(&self) -> Result<Box<dyn Notification>> {
        crate::report::count("notification");
        Ok(Box::new(Point { queue: self.queue.clone(), ticket: Mutex::default() }))
    }

    fn flush(&self) -> Result<()> {
        crate::report::count("flush");
        self.queue.ticket().wait()
    }

    fn run_end(&self) -> Result<()> {
        crate::report::count("stream_run_end");
        Ok(())
    }
}

impl Drop for DeviceStream {
    fn drop(&mut self) {
        crate::report::count("stream_release");
    }
}

/// A notification.
struct Point {
    queue: Arc<Queue>,
    ticket: Mutex<Option<Ticket>>,
}

impl Point {
    fn ticket(&self) -> Result<Ticket> {
        let ticket = self.ticket.lock().expect("no panic while locked").clone();
        ticket.ok_or_else(|| Error::Internal("wait before activate".into()))
    }
}

impl Notification for Point {
    fn activate(&self) -> Result<()> {
        *self.ticket.lock().expect("no panic while locked") = Some(self.queue.ticket());
        Ok(())
    }

    fn wait_on_device(&self, consumer: Option<StreamRef<'_>>) -> Result<()> {
        let ticket = self.ticket()?;
        match consumer.and_then(|stream| stream.downcast::<DeviceStream>()) {
            Some(consumer) => {
                crate::report::count("wait_on_device");
                consumer.queue.push(move || ticket.wait().expect("the producer's own flush reports this"));
                Ok(())
            }
            None => {
                crate::report::count("wait_on_device_null");
                ticket.wait()
            }
        }
    }

    fn wait_on_host(&self) -> Result<()> {
        crate::report::count("wait_on_host");
        self.ticket()?.wait()
    }
}

/// Makes streams.
pub struct Streams;

impl StreamSource for Streams {
    fn create_stream(&self, _device: MemoryDevice) -> Result<Box<dyn Stream>> {
        crate::report::count("stream_create");
        let stream = DeviceStream { queue: Arc::new(Queue::new()) };
        let mut queues = QUEUES.lock().expect("no panic while locked");
        let queues = queues.get_or_insert_default();
        queues.retain(|_, queue| queue.strong_count() > 0);
        queues.insert(stream.handle().addr(), Arc::downgrade(&stream.queue));
        Ok(Box::new(stream))
    }
}
