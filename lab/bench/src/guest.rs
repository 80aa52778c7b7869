//! A guest in a helper process: a thread or a KVM virtual CPU. Both take the same orders.
//!
//! Before: `role` gives orders. After: `native` or `vcpu` has carried them out.
//! Threads: this one. Units: pages. Promise: an order that the kind of guest cannot carry out is an error;
//! [`Order::Touch`] touches only pages that are out, and every kind counts wrong bytes.

use anyhow::{Result, bail};

use crate::cpu;
use crate::native::Native;
use crate::order::{Answer, GuestConfig, GuestKind, Order};
use crate::pager::{enter, own_file};
use crate::vcpu::Vcpu;

enum Body {
    Empty,
    Native(Native),
    Vcpu(Vcpu),
}

pub(crate) struct Guest {
    config: GuestConfig,
    body: Body,
}

impl Guest {
    pub(crate) fn new(config: GuestConfig) -> Result<Self> {
        enter(&config.backing)?;
        Ok(Self { config, body: Body::Empty })
    }

    pub(crate) fn obey(&mut self, order: Order) -> Result<Answer> {
        match (order, &mut self.body) {
            (Order::Fill, Body::Empty) => self.fill(),
            (Order::PageOut, Body::Native(native)) => native.page_out(self.config.pages).map(Answer::Out),
            (Order::Touch { seed, pace }, Body::Native(native)) => {
                let _stay = pace.pinned.then(cpu::Stay::here);
                native.touch(&self.config, seed, pace).map(Answer::Touched)
            }
            (Order::Read { from_ns, until_ns }, Body::Native(native)) => {
                native.read(from_ns, until_ns).map(Answer::Read)
            }
            (Order::Storm, Body::Native(native)) => native.start_storm().map(|()| Answer::Done),
            (Order::Pause, Body::Native(native)) => native.pause(),
            (Order::Verify, Body::Native(native)) => native.verify().map(|()| Answer::Done),
            (Order::PageOut, Body::Vcpu(vcpu)) => vcpu.page_out(self.config.pages).map(Answer::Out),
            (Order::Touch { .. }, Body::Vcpu(vcpu)) => vcpu.touch().map(Answer::Touched),
            (Order::Verify, Body::Vcpu(_)) => Ok(Answer::Done),
            (order, _) => bail!("this guest cannot do {order:?} now"),
        }
    }

    fn fill(&mut self) -> Result<Answer> {
        let (body, ram) = match self.config.kind {
            GuestKind::Native => {
                let native = Native::filled(&self.config)?;
                let ram = native.file();
                (Body::Native(native), ram)
            }
            GuestKind::Kvm => {
                let vcpu = Vcpu::start(&self.config)?;
                let ram = Some(own_file(vcpu.ram()));
                (Body::Vcpu(vcpu), ram)
            }
        };
        self.body = body;
        Ok(Answer::Filled { ram })
    }
}
