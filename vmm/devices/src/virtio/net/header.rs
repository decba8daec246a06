//! The header that precedes each frame (virtio 1.3, 5.1.6). The tap uses the same format.

use thiserror::Error;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_HDR_F_NEEDS_CSUM,
    VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_NONE, VIRTIO_NET_HDR_GSO_TCPV4,
    VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP,
};

/// Length of the header. With VERSION_1 the header always includes `num_buffers`.
pub const HEADER_LEN: usize = 12;

const FLAGS: usize = 0;
const GSO_TYPE: usize = 1;
const GSO_SIZE: usize = 4;
const CSUM_START: usize = 6;
const CSUM_OFFSET: usize = 8;
const NUM_BUFFERS: usize = 10;
/// Length of an Internet checksum.
const CSUM_LEN: usize = 2;

/// Offloads that one side may use in frames to the other side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    pub csum: bool,
    /// TCP segmentation over IPv4.
    pub tso4: bool,
    /// TCP segmentation over IPv6.
    pub tso6: bool,
    /// TCP segmentation with ECN.
    pub ecn: bool,
    /// UDP fragmentation.
    pub ufo: bool,
}

impl Offloads {
    /// Offloads that the driver may use in frames to the device.
    pub fn of_driver(features: u64) -> Self {
        Self::of(
            features,
            [
                VIRTIO_NET_F_CSUM,
                VIRTIO_NET_F_HOST_TSO4,
                VIRTIO_NET_F_HOST_TSO6,
                VIRTIO_NET_F_HOST_ECN,
                VIRTIO_NET_F_HOST_UFO,
            ],
        )
    }

    /// Offloads that the device may use in frames to the driver.
    pub fn of_device(features: u64) -> Self {
        Self::of(
            features,
            [
                VIRTIO_NET_F_GUEST_CSUM,
                VIRTIO_NET_F_GUEST_TSO4,
                VIRTIO_NET_F_GUEST_TSO6,
                VIRTIO_NET_F_GUEST_ECN,
                VIRTIO_NET_F_GUEST_UFO,
            ],
        )
    }

    fn of(features: u64, bits: [u32; 5]) -> Self {
        let [csum, tso4, tso6, ecn, ufo] = bits.map(|bit| features & 1 << bit != 0);
        Self { csum, tso4, tso6, ecn, ufo }
    }

    /// Checks that each enabled offload's prerequisites are enabled as well (5.1.3.1).
    pub fn is_consistent(self) -> bool {
        let long = self.tso4 || self.tso6;
        (self.csum || !long && !self.ufo) && (long || !self.ecn)
    }

    fn allows(self, gso_type: u8) -> bool {
        let ecn = gso_type & VIRTIO_NET_HDR_GSO_ECN as u8 != 0;
        let kind = u32::from(gso_type & !(VIRTIO_NET_HDR_GSO_ECN as u8));
        match kind {
            VIRTIO_NET_HDR_GSO_TCPV4 => self.tso4 && (self.ecn || !ecn),
            VIRTIO_NET_HDR_GSO_TCPV6 => self.tso6 && (self.ecn || !ecn),
            VIRTIO_NET_HDR_GSO_UDP => self.ufo && !ecn,
            _ => false,
        }
    }
}

/// Reason to refuse a header.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum HeaderError {
    /// The frame uses checksum offload, which was not negotiated.
    #[error("checksum offload was not negotiated")]
    Csum,
    #[error("checksum field at {at} (data from {start}) is beyond the frame of {len} bytes")]
    CsumOutside {
        /// Offset at which the checksummed data starts.
        start: u16,
        at: usize,
        len: usize,
    },
    /// The frame uses a type of segmentation that was not negotiated.
    #[error("segmentation type {gso_type:#x} was not negotiated")]
    Gso { gso_type: u8 },
    /// The frame uses segmentation without a checksum or a segment length.
    #[error("segmentation type {gso_type:#x} needs a segment length and an offloaded checksum")]
    GsoIncomplete { gso_type: u8 },
}

/// Checks and converts a header from the driver, so that it can be passed to the tap. The frame has
/// `frame_len` bytes. Clears fields that the device must ignore (5.1.6.2.2), and refuses offloads
/// that were not negotiated.
pub fn check_sent(
    header: &mut [u8; HEADER_LEN],
    frame_len: usize,
    allowed: Offloads,
) -> Result<(), HeaderError> {
    header[FLAGS] &= VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
    let needs_csum = header[FLAGS] != 0;
    let gso_type = header[GSO_TYPE];
    if needs_csum {
        if !allowed.csum {
            return Err(HeaderError::Csum);
        }
        let start = le16(header, CSUM_START);
        let at = usize::from(start) + usize::from(le16(header, CSUM_OFFSET));
        if at + CSUM_LEN > frame_len {
            return Err(HeaderError::CsumOutside { start, at, len: frame_len });
        }
    } else {
        header[CSUM_START..NUM_BUFFERS].fill(0);
    }
    if u32::from(gso_type) == VIRTIO_NET_HDR_GSO_NONE {
        // `hdr_len` is retained as a hint at the length of the protocol headers.
        header[GSO_SIZE..CSUM_START].fill(0);
    } else if !allowed.allows(gso_type) {
        return Err(HeaderError::Gso { gso_type });
    } else if !needs_csum || le16(header, GSO_SIZE) == 0 {
        return Err(HeaderError::GsoIncomplete { gso_type });
    }
    header[NUM_BUFFERS..].fill(0);
    Ok(())
}

/// Checks and converts a header from the tap, so that it can be passed to the driver. Fails if the
/// frame uses offloads that were not negotiated. Such a frame was in the tap's queue before the
/// offloads were set.
pub fn check_received(header: &mut [u8; HEADER_LEN], allowed: Offloads) -> Result<(), HeaderError> {
    if !allowed.csum {
        if header[FLAGS] & VIRTIO_NET_HDR_F_NEEDS_CSUM as u8 != 0 {
            return Err(HeaderError::Csum);
        }
        // The kernel also reports verified checksums, which a driver without the feature must not
        // see (5.1.6.4.1).
        header[FLAGS] = 0;
    }
    let gso_type = header[GSO_TYPE];
    if u32::from(gso_type) != VIRTIO_NET_HDR_GSO_NONE && !allowed.allows(gso_type) {
        return Err(HeaderError::Gso { gso_type });
    }
    Ok(())
}

/// Sets the number of buffers that the frame occupies.
pub fn set_num_buffers(header: &mut [u8], buffers: u16) {
    header[NUM_BUFFERS..HEADER_LEN].copy_from_slice(&buffers.to_le_bytes());
}

fn le16(header: &[u8; HEADER_LEN], at: usize) -> u16 {
    u16::from_le_bytes([header[at], header[at + 1]])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: Offloads = Offloads { csum: true, tso4: true, tso6: true, ecn: true, ufo: true };
    const CSUM: Offloads =
        Offloads { csum: true, tso4: false, tso6: false, ecn: false, ufo: false };

    fn header(flags: u8, gso_type: u8, gso_size: u16, start: u16, offset: u16) -> [u8; HEADER_LEN] {
        let mut header = [0xee; HEADER_LEN];
        header[FLAGS] = flags;
        header[GSO_TYPE] = gso_type;
        header[GSO_SIZE..][..2].copy_from_slice(&gso_size.to_le_bytes());
        header[CSUM_START..][..2].copy_from_slice(&start.to_le_bytes());
        header[CSUM_OFFSET..][..2].copy_from_slice(&offset.to_le_bytes());
        header
    }

    #[test]
    fn sent_offloads_must_be_negotiated() {
        let none = Offloads::default();
        let sent = |mut header, allowed| check_sent(&mut header, 1000, allowed);
        assert_eq!(sent(header(0, 0, 0, 0, 0), none), Ok(()));
        assert_eq!(sent(header(1, 0, 0, 34, 16), none), Err(HeaderError::Csum));
        assert_eq!(sent(header(1, 0, 0, 34, 16), CSUM), Ok(()));
        assert_eq!(sent(header(1, 1, 1448, 34, 16), CSUM), Err(HeaderError::Gso { gso_type: 1 }));
        assert_eq!(
            sent(header(1, 0x81, 1448, 34, 16), Offloads { tso4: true, ..CSUM }),
            Err(HeaderError::Gso { gso_type: 0x81 })
        );
        for gso_type in [1, 4, 3, 0x81, 0x84] {
            assert_eq!(sent(header(1, gso_type, 1448, 34, 16), ALL), Ok(()), "{gso_type:#x}");
            assert_eq!(
                sent(header(0, gso_type, 1448, 34, 16), ALL),
                Err(HeaderError::GsoIncomplete { gso_type })
            );
            assert_eq!(
                sent(header(1, gso_type, 0, 34, 16), ALL),
                Err(HeaderError::GsoIncomplete { gso_type })
            );
        }
        for gso_type in [2, 5, 0x80, 0x83, 0xff] {
            assert_eq!(
                sent(header(1, gso_type, 1448, 34, 16), ALL),
                Err(HeaderError::Gso { gso_type })
            );
        }
    }

    #[test]
    fn checksum_outside_of_the_frame_is_refused() {
        let sent = |start, offset| check_sent(&mut header(1, 0, 0, start, offset), 100, CSUM);
        assert_eq!(sent(82, 16), Ok(()));
        assert_eq!(sent(83, 16), Err(HeaderError::CsumOutside { start: 83, at: 99, len: 100 }));
        assert!(sent(u16::MAX, u16::MAX).is_err());
    }

    #[test]
    fn fields_that_a_device_ignores_are_cleared_for_the_tap() {
        let mut sent = header(0xfe, 0, 77, 5, 6);
        check_sent(&mut sent, 60, ALL).unwrap();
        assert_eq!(sent, [0, 0, 0xee, 0xee, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn received_offloads_must_be_negotiated() {
        let received =
            |mut header, allowed| check_received(&mut header, allowed).map(|()| header[FLAGS]);
        let none = Offloads::default();
        assert_eq!(received(header(2, 0, 0, 0, 0), none), Ok(0));
        assert_eq!(received(header(2, 0, 0, 0, 0), CSUM), Ok(2));
        assert_eq!(received(header(1, 0, 0, 34, 16), none), Err(HeaderError::Csum));
        assert_eq!(
            received(header(1, 4, 1448, 34, 16), CSUM),
            Err(HeaderError::Gso { gso_type: 4 })
        );
        assert_eq!(received(header(1, 4, 1448, 34, 16), ALL), Ok(1));
    }

    #[test]
    fn offloads_require_each_other() {
        assert!(ALL.is_consistent() && CSUM.is_consistent() && Offloads::default().is_consistent());
        assert!(!Offloads { csum: false, ..ALL }.is_consistent());
        assert!(!Offloads { ecn: true, ..CSUM }.is_consistent());
        assert!(!Offloads { ufo: true, ..Offloads::default() }.is_consistent());
        assert_eq!(
            Offloads::of_driver(1 << 0 | 1 << 11),
            Offloads { csum: true, tso4: true, ..Offloads::default() }
        );
        assert_eq!(
            Offloads::of_device(1 << 1 | 1 << 8),
            Offloads { csum: true, tso6: true, ..Offloads::default() }
        );
    }

    proptest! {
        #[test]
        fn accepted_header_is_accepted_unchanged_again(bytes: [u8; HEADER_LEN], len in 14usize..70_000) {
            let mut once = bytes;
            if check_sent(&mut once, len, ALL).is_ok() {
                let mut twice = once;
                prop_assert_eq!(check_sent(&mut twice, len, ALL), Ok(()));
                prop_assert_eq!(once, twice);
                prop_assert_eq!(check_received(&mut twice, ALL), Ok(()));
            }
        }
    }
}
