//! Requests of the virtio-blk driver (virtio 1.3, 5.2.6). Parsing checks each request completely,
//! so that its execution needs no further checks.
//!
//! A driver may divide a request into descriptors at any byte (2.7.4.1), so parsing ignores
//! descriptor boundaries. The header is at the start of the device-readable bytes, and the status
//! is the last device-writable byte.

use thiserror::Error;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_queue::DescriptorChain;
use vm_memory::{GuestAddress, GuestMemory};

use super::segments::{Segment, Segments};
use crate::disk::range::{DiskRange, SECTOR_BYTES, Unmap};

/// Largest number of ranges in a DISCARD or WRITE ZEROES request.
pub const MAX_RANGES: u32 = 32;
/// Largest number of sectors in such a range: 2 GiB.
pub const MAX_RANGE_SECTORS: u32 = 1 << 22;

/// Length of a request's header: type, reserved field and first sector.
const HEADER_LEN: u64 = 16;
/// Length of `struct virtio_blk_discard_write_zeroes`: first sector, number of sectors, flags.
const RANGE_LEN: u64 = 16;

/// Limits that requests are checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of the disk, in whole blocks.
    pub capacity_bytes: u64,
    /// Required alignment of every address and length on the disk. The required alignment is a
    /// multiple of [`SECTOR_BYTES`].
    pub block_bytes: u32,
    pub read_only: bool,
    /// DISCARD was negotiated.
    pub discard: bool,
    /// WRITE ZEROES was negotiated.
    pub write_zeroes: bool,
    /// Maximum number of descriptors in a request.
    pub max_descriptors: u16,
}

/// Returns the range of `len_bytes` that starts at `first_sector`. Fails if the range exceeds the
/// disk or is not a whole number of blocks.
pub fn disk_range(
    first_sector: u64,
    len_bytes: u64,
    limits: &Limits,
) -> Result<DiskRange, RequestError> {
    let outside =
        RequestError::Outside { first_sector, len_bytes, capacity_bytes: limits.capacity_bytes };
    let Some(offset_bytes) = first_sector.checked_mul(SECTOR_BYTES) else { return Err(outside) };
    match offset_bytes.checked_add(len_bytes) {
        Some(end) if end <= limits.capacity_bytes => (),
        _ => return Err(outside),
    }
    let block_bytes = u64::from(limits.block_bytes);
    if !offset_bytes.is_multiple_of(block_bytes) || !len_bytes.is_multiple_of(block_bytes) {
        return Err(RequestError::PartOfBlock {
            first_sector,
            len_bytes,
            block_bytes: limits.block_bytes,
        });
    }
    Ok(DiskRange::at(offset_bytes, len_bytes))
}

/// A checked operation. Its execution fails only if memory or the media fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Read from the disk into the segments, which have the same total length as the range.
    Read(DiskRange, Segments),
    /// Write to the disk from the segments, which have the same total length as the range.
    Write(DiskRange, Segments),
    /// Make all writes that were already answered durable.
    Flush,
    /// Copy the serial number into the segments.
    GetId(Segments),
    Discard(Vec<DiskRange>),
    /// Zero the ranges. If the flag of a range is set, its blocks may be deallocated.
    WriteZeroes(Vec<(DiskRange, Unmap)>),
}

/// A request and the address of its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub head: u16,
    /// Address of the status byte.
    pub status: GuestAddress,
    pub operation: Operation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Ok,
    IoError,
    Unsupported,
}

impl Status {
    /// Status code that the driver reads.
    pub fn code(self) -> u8 {
        (match self {
            Self::Ok => VIRTIO_BLK_S_OK,
            Self::IoError => VIRTIO_BLK_S_IOERR,
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
        }) as u8
    }
}

/// A chain that cannot be executed.
#[derive(Debug)]
pub struct Refusal {
    /// Address of the status byte. If `None`, the chain is returned without a status.
    pub status: Option<GuestAddress>,
    pub error: RequestError,
}

#[derive(Debug, Error)]
pub enum RequestError {
    /// The last valid descriptor refers to a next one, which is missing or invalid.
    #[error("chain is broken after {descriptors} descriptors")]
    Broken {
        /// Number of valid descriptors.
        descriptors: usize,
    },
    #[error("chain has more than {max} descriptors")]
    TooManyDescriptors { max: u16 },
    #[error("readable descriptor follows a writable one")]
    Order,
    #[error("chain has no status byte")]
    NoStatus,
    #[error("header has {len} bytes, {HEADER_LEN} are needed")]
    ShortHeader { len: u64 },
    /// The header or the data after it is not in memory.
    #[error("cannot read the {what}")]
    Memory {
        what: &'static str,
        #[source]
        source: vm_memory::guest_memory::Error,
    },
    /// The type is unknown or was not negotiated.
    #[error("unsupported request type {kind}")]
    UnknownType { kind: u32 },
    /// The request has device-readable or device-writable buffers that its type does not use.
    #[error("request of type {kind} has {len} bytes of buffers of the wrong direction")]
    Direction { kind: u32, len: u64 },
    #[error("{len_bytes} bytes at sector {first_sector} exceed the disk size {capacity_bytes}")]
    Outside {
        first_sector: u64,
        /// Length of the range.
        len_bytes: u64,
        capacity_bytes: u64,
    },
    #[error(
        "{len_bytes} bytes at sector {first_sector} are not a multiple of the block size {block_bytes}"
    )]
    PartOfBlock {
        first_sector: u64,
        /// Length of the range.
        len_bytes: u64,
        block_bytes: u32,
    },
    #[error("disk is read-only; refused request type {kind}")]
    ReadOnly { kind: u32 },
    #[error("data of {len} bytes is not 1 to {MAX_RANGES} ranges of {RANGE_LEN} bytes each")]
    BadRanges {
        /// Length of the data.
        len: u64,
    },
    #[error("range of {sectors} sectors exceeds the maximum {MAX_RANGE_SECTORS}")]
    LongRange { sectors: u32 },
    #[error("flags {flags:#x} are invalid for request type {kind}")]
    BadFlags { kind: u32, flags: u32 },
}

impl RequestError {
    /// Status for the driver (5.2.6.2).
    pub fn status(&self) -> Status {
        match self {
            Self::UnknownType { .. } | Self::BadFlags { .. } => Status::Unsupported,
            _ => Status::IoError,
        }
    }
}

/// `struct virtio_blk_req` without its data.
struct Header {
    kind: u32,
    first_sector: u64,
}

impl Request {
    /// Parses a request from `chain`, which was popped from the queue in `memory`. Data buffers are
    /// not checked here but on access, because their memory may be unplugged in the meantime.
    pub fn parse<M: GuestMemory>(
        memory: &M,
        chain: &mut DescriptorChain<&M>,
        limits: &Limits,
    ) -> Result<Self, Refusal> {
        let head = chain.head_index();
        let (mut readable, mut writable) =
            collect(chain, limits).map_err(|error| Refusal { status: None, error })?;
        let Some(status) = writable.cut_last_byte() else {
            return Err(Refusal { status: None, error: RequestError::NoStatus });
        };
        let operation = read_header(memory, &mut readable)
            .and_then(|header| operation(memory, &header, readable, writable, limits))
            .map_err(|error| Refusal { status: Some(status), error })?;
        Ok(Self { head, status, operation })
    }
}

/// Collects the chain's device-readable and device-writable buffers.
fn collect<M: GuestMemory>(
    chain: &mut DescriptorChain<&M>,
    limits: &Limits,
) -> Result<(Segments, Segments), RequestError> {
    let (mut readable, mut writable) = (Segments::default(), Segments::default());
    let (mut descriptors, mut goes_on) = (0, true);
    for descriptor in chain {
        descriptors += 1;
        if descriptors > usize::from(limits.max_descriptors) {
            return Err(RequestError::TooManyDescriptors { max: limits.max_descriptors });
        }
        goes_on = descriptor.has_next();
        let segment = Segment { address: descriptor.addr(), len: descriptor.len() };
        if descriptor.is_write_only() {
            writable.push(segment);
        } else if !writable.is_empty() {
            return Err(RequestError::Order);
        } else {
            readable.push(segment);
        }
    }
    // The iterator ends without an error at a loop, an invalid descriptor, or a nested indirect
    // table.
    if goes_on { Err(RequestError::Broken { descriptors }) } else { Ok((readable, writable)) }
}

fn read_header<M: GuestMemory>(
    memory: &M,
    readable: &mut Segments,
) -> Result<Header, RequestError> {
    let len = readable.len_bytes();
    if len < HEADER_LEN {
        return Err(RequestError::ShortHeader { len });
    }
    let mut bytes = [0; HEADER_LEN as usize];
    readable
        .read(memory, 0, &mut bytes)
        .map_err(|source| RequestError::Memory { what: "header", source })?;
    readable.drop_front(HEADER_LEN);
    Ok(Header { kind: le32(&bytes, 0), first_sector: le64(&bytes, 8) })
}

fn operation<M: GuestMemory>(
    memory: &M,
    header: &Header,
    readable: Segments,
    writable: Segments,
    limits: &Limits,
) -> Result<Operation, RequestError> {
    let kind = header.kind;
    let only = |used: Segments, other: Segments| match other.len_bytes() {
        0 => Ok(used),
        len => Err(RequestError::Direction { kind, len }),
    };
    let writes = || if limits.read_only { Err(RequestError::ReadOnly { kind }) } else { Ok(()) };
    let range = |buffers: &Segments| disk_range(header.first_sector, buffers.len_bytes(), limits);
    match kind {
        VIRTIO_BLK_T_IN => {
            let buffers = only(writable, readable)?;
            Ok(Operation::Read(range(&buffers)?, buffers))
        }
        VIRTIO_BLK_T_OUT => {
            // If RO is offered, the device MUST answer IOERR and write nothing (5.2.6.2).
            writes()?;
            let buffers = only(readable, writable)?;
            Ok(Operation::Write(range(&buffers)?, buffers))
        }
        VIRTIO_BLK_T_FLUSH => Ok(Operation::Flush),
        VIRTIO_BLK_T_GET_ID => {
            let mut buffers = only(writable, readable)?;
            buffers.truncate(u64::from(VIRTIO_BLK_ID_BYTES));
            Ok(Operation::GetId(buffers))
        }
        VIRTIO_BLK_T_DISCARD if limits.discard => {
            writes()?;
            let ranges = ranges(memory, kind, &only(readable, writable)?, limits)?;
            Ok(Operation::Discard(ranges.into_iter().map(|(range, _)| range).collect()))
        }
        VIRTIO_BLK_T_WRITE_ZEROES if limits.write_zeroes => {
            writes()?;
            Ok(Operation::WriteZeroes(ranges(memory, kind, &only(readable, writable)?, limits)?))
        }
        kind => Err(RequestError::UnknownType { kind }),
    }
}

/// Parses the ranges of a DISCARD or WRITE ZEROES request.
fn ranges<M: GuestMemory>(
    memory: &M,
    kind: u32,
    list: &Segments,
    limits: &Limits,
) -> Result<Vec<(DiskRange, Unmap)>, RequestError> {
    let len = list.len_bytes();
    if len == 0 || !len.is_multiple_of(RANGE_LEN) || len > RANGE_LEN * u64::from(MAX_RANGES) {
        return Err(RequestError::BadRanges { len });
    }
    let mut bytes = vec![0; len as usize];
    list.read(memory, 0, &mut bytes)
        .map_err(|source| RequestError::Memory { what: "list of ranges", source })?;
    bytes.chunks_exact(RANGE_LEN as usize).map(|range| one_range(kind, range, limits)).collect()
}

fn one_range(kind: u32, bytes: &[u8], limits: &Limits) -> Result<(DiskRange, Unmap), RequestError> {
    let (first_sector, sectors, flags) = (le64(bytes, 0), le32(bytes, 8), le32(bytes, 12));
    // The device must answer UNSUPP to unknown flags and to the unmap flag in a DISCARD (5.2.6.2).
    let unmap = match (kind, flags) {
        (_, 0) => Unmap::Forbidden,
        (VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP) => Unmap::Allowed,
        _ => return Err(RequestError::BadFlags { kind, flags }),
    };
    if sectors > MAX_RANGE_SECTORS {
        return Err(RequestError::LongRange { sectors });
    }
    let range = disk_range(first_sector, u64::from(sectors) * SECTOR_BYTES, limits)?;
    Ok((range, unmap))
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
