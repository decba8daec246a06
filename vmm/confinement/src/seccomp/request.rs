//! Requests of ioctl(). Each constant is the type and the number of the request; its upper bits are
//! the size and the direction of the data (asm-generic/ioctl.h).

// linux/kvm.h.
pub(super) const KVM_RUN: u32 = 0xae80;
pub(super) const KVM_SET_USER_MEMORY_REGION: u32 = 0xae46;
pub(super) const KVM_IRQ_LINE: u32 = 0xae61;
pub(super) const KVM_SET_GSI_ROUTING: u32 = 0xae6a;
pub(super) const KVM_IRQFD: u32 = 0xae76;
pub(super) const KVM_IOEVENTFD: u32 = 0xae79;
pub(super) const KVM_GET_CLOCK: u32 = 0xae7c;
pub(super) const KVM_GET_REGS: u32 = 0xae81;
pub(super) const KVM_SET_REGS: u32 = 0xae82;
pub(super) const KVM_SET_SREGS: u32 = 0xae84;
pub(super) const KVM_SET_MSRS: u32 = 0xae89;
pub(super) const KVM_SET_LAPIC: u32 = 0xae8f;
pub(super) const KVM_GET_MP_STATE: u32 = 0xae98;
pub(super) const KVM_SET_MP_STATE: u32 = 0xae99;
pub(super) const KVM_NMI: u32 = 0xae9a;
pub(super) const KVM_SET_VCPU_EVENTS: u32 = 0xaea0;
pub(super) const KVM_SIGNAL_MSI: u32 = 0xaea5;
pub(super) const KVM_KVMCLOCK_CTRL: u32 = 0xaead;

// asm-generic/ioctls.h.
pub(super) const TCGETS: u32 = 0x5401;
pub(super) const TCSETS2: u32 = 0x542b;
pub(super) const TIOCGWINSZ: u32 = 0x5413;
pub(super) const FIONBIO: u32 = 0x5421;

// linux/if_tun.h.
pub(super) const TUNSETOFFLOAD: u32 = 0x54d0;
pub(super) const TUNGETIFF: u32 = 0x54d2;
pub(super) const TUNSETQUEUE: u32 = 0x54d9;

// linux/vhost.h.
pub(super) const VHOST_SET_FEATURES: u32 = 0xaf00;
pub(super) const VHOST_SET_OWNER: u32 = 0xaf01;
pub(super) const VHOST_RESET_OWNER: u32 = 0xaf02;
pub(super) const VHOST_SET_MEM_TABLE: u32 = 0xaf03;
pub(super) const VHOST_SET_VRING_NUM: u32 = 0xaf10;
pub(super) const VHOST_SET_VRING_ADDR: u32 = 0xaf11;
pub(super) const VHOST_SET_VRING_BASE: u32 = 0xaf12;
pub(super) const VHOST_SET_VRING_KICK: u32 = 0xaf20;
pub(super) const VHOST_SET_VRING_CALL: u32 = 0xaf21;
pub(super) const VHOST_SET_VRING_ERR: u32 = 0xaf22;
pub(super) const VHOST_NET_SET_BACKEND: u32 = 0xaf30;

// linux/userfaultfd.h.
pub(super) const UFFDIO_REGISTER: u32 = 0xc020_aa00;
pub(super) const UFFDIO_WAKE: u32 = 0xaa02;
pub(super) const UFFDIO_WRITEPROTECT: u32 = 0xaa06;

/// Requests that only the construction of a VM or a device needs.
pub(super) const SET_UP: &[u32] = &[
    0xaa00, // USERFAULTFD_IOC_NEW and UFFDIO_REGISTER
    0xaa06, // UFFDIO_WRITEPROTECT
    0xaa3f, // UFFDIO_API
    0xae00, // KVM_GET_API_VERSION
    0xae01, // KVM_CREATE_VM
    0xae03, // KVM_CHECK_EXTENSION
    0xae04, // KVM_GET_VCPU_MMAP_SIZE
    0xae05, // KVM_GET_SUPPORTED_CPUID
    0xae41, // KVM_CREATE_VCPU
    0xae47, // KVM_SET_TSS_ADDR
    0xae48, // KVM_SET_IDENTITY_MAP_ADDR
    0xae60, // KVM_CREATE_IRQCHIP
    0xae7b, // KVM_SET_CLOCK
    0xae83, // KVM_GET_SREGS
    0xae88, // KVM_GET_MSRS
    0xae8e, // KVM_GET_LAPIC
    0xae90, // KVM_SET_CPUID2
    0xae9f, // KVM_GET_VCPU_EVENTS
    0xaea3, // KVM_ENABLE_CAP and KVM_GET_TSC_KHZ
    0x540f, // TIOCGPGRP
    0x542a, // TCGETS2
    TCSETS2, 0x5430, // TIOCGPTN
    0x5431, // TIOCSPTLCK
    0x5441, // TIOCGPTPEER
    0x54ca, // TUNSETIFF
    0x54d8, // TUNSETVNETHDRSZ
    0x8913, // SIOCGIFFLAGS
    0x8914, // SIOCSIFFLAGS
    0x8916, // SIOCSIFADDR
    0x891c, // SIOCSIFNETMASK
    0x8921, // SIOCGIFMTU
    0x8922, // SIOCSIFMTU
    0x8924, // SIOCSIFHWADDR
    0x8927, // SIOCGIFHWADDR
    0x8933, // SIOCGIFINDEX
    0x125e, // BLKROGET
    0x1268, // BLKSSZGET
    0x1272, // BLKGETSIZE64
    0x127b, // BLKPBSZGET
    0x6601, // FS_IOC_GETFLAGS
    0x660b, // FS_IOC_FIEMAP
];
